"use strict";
// Shows the data set and the ratio that the reader selects, draws its figures in the page's colours, sorts tables, and copies.
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const narrow = matchMedia("(max-width: 700px)");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const selected = () => Object.fromEntries([...document.querySelectorAll("[data-select]")]
    .filter((input) => input.tagName === "SELECT" || input.checked)
    .map((input) => [input.dataset.select, input.value]));
  const shown = (layout, box, count) => {
    const style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(`--${name}`).trim();
    const axis = { gridcolor: color("grid"), linecolor: color("line"), zerolinecolor: color("muted"), ticks: "", fixedrange: narrow.matches };
    const themed = {
      ...layout,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: style.fontFamily, size: narrow.matches ? 12 : 13, color: color("text") },
      hoverlabel: { bgcolor: color("card"), bordercolor: color("line"), font: { color: color("text"), size: 13 }, align: "left", namelength: -1 },
      xaxis: { ...axis, ...layout.xaxis },
      yaxis: { ...axis, ...layout.yaxis },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: color("line"), activecolor: color("muted") },
      dragmode: narrow.matches ? false : "zoom",
      uirevision: box.dataset.figure,
    };
    if (narrow.matches) {  // what a title says after its colon has no room
      for (const one of [themed.xaxis, themed.yaxis]) one.title = { ...one.title, text: one.title.text.split(":")[0] };
    }
    themed.legend = { ...layout.legend, bgcolor: "rgba(0,0,0,0)", tracegroupgap: 0, ...(narrow.matches
      ? { orientation: "h", x: 0, xanchor: "left", y: 1.02, yanchor: "bottom" }
      : { x: 1.01, y: 1, yanchor: "top" }) };
    if (narrow.matches) themed.height = Math.min(layout.height, 380) + 20 * count;
    return themed;
  };
  const cell = (tag, content, scope) => {
    const made = document.createElement(tag);
    made.textContent = typeof content === "number" ? String(+content.toPrecision(4)) : content ?? "";
    if (scope) made.scope = scope;
    return made;
  };
  const row = (...cells) => {
    const made = document.createElement("tr");
    made.append(...cells);
    return made;
  };
  const fill = (box) => {  // the table behind a plot, which is made once it is opened
    const details = box.parentElement.querySelector(".numbers"), { data, layout } = box;
    if (!details.open || !data) return;
    const table = document.createElement("table"), head = table.createTHead(), body = table.createTBody();
    const names = ["xaxis", "yaxis"].map((name) => layout[name].title.text);
    head.append(row(...["", "setting", ...names].map((name) => cell("th", name, "col"))));
    for (const trace of data) for (const [place, x] of [...trace.x].entries()) {
      const setting = trace.customdata?.[place];
      body.append(row(cell("th", trace.name, "row"), cell("td", setting), cell("td", x), cell("td", trace.y[place])));
    }
    details.lastElementChild.replaceChildren(table);
  };
  const draw = (box, state) => {
    const of = figures[box.dataset.figure], figure = of[state.set] ?? of[`${state.set} ${state.ratio}`];
    if (!box.parentElement.closest("details, section").matches("section, [open]")) return;  // a folded one has no width
    box.hidden = !figure;
    box.nextElementSibling.hidden = !!figure;
    box.parentElement.querySelector(".numbers").hidden = !figure;
    if (!figure) return;
    const { data: known, layout } = structuredClone(figure);
    const all = box.parentElement.querySelector("[data-all]");
    all.parentElement.hidden = known.every((trace) => trace.visible !== false);
    const data = known.filter((trace) => all.checked || trace.visible !== false);
    for (const trace of data) trace.visible = true;
    const listed = data.filter((trace) => trace.showlegend !== false).length;
    const buttons = [["toImage"], ["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]];
    const config = { responsive: true, displaylogo: false, modeBarButtons: buttons, displayModeBar: !narrow.matches };
    Plotly.react(box, data, shown(layout, box, listed), config);
    fill(box);
  };
  const update = () => {
    const state = selected();
    for (const panel of document.querySelectorAll(".panel")) {
      panel.hidden = ["set", "ratio"].some((name) => name in panel.dataset && panel.dataset[name] !== state[name]);
    }
    document.querySelectorAll(".plot").forEach((box) => draw(box, state));
  };
  const markdown = (table) => {
    const lines = [...table.rows].map((row) => [...row.cells].map((cell) => cell.innerText.trim().replace(/\s+/g, " ").replaceAll("|", "\\|")));
    lines.splice(1, 0, lines[0].map((_, place) => (place ? "--:" : "---")));
    return lines.map((cells) => `| ${cells.join(" | ")} |`).join("\n");
  };
  const copy = async (button) => {
    const text = button.dataset.copy ?? markdown(button.parentElement.previousElementSibling.querySelector("table"));
    const title = button.textContent;
    try {
      await navigator.clipboard.writeText(text);
    } catch {  // without the permission, or from a page that is not secure
      const area = Object.assign(document.createElement("textarea"), { value: text });
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = title; }, 1500);
  };
  const sort = (button) => {
    const heading = button.closest("th"), rows = [...heading.closest("table").tBodies[0].rows], column = heading.cellIndex;
    const rising = heading.ariaSort === "descending";
    for (const other of heading.parentNode.cells) other.removeAttribute("aria-sort");
    heading.ariaSort = rising ? "ascending" : "descending";
    const value = (row) => row.cells[column].dataset.key;
    rows.sort((a, b) => {
      const [one, other] = [value(a), value(b)];
      if (one === undefined || other === undefined) return (one === undefined) - (other === undefined);  // unknown comes last
      const order = isNaN(one) || isNaN(other) ? one.localeCompare(other) : one - other;
      return rising ? order : -order;
    });
    heading.closest("table").tBodies[0].append(...rows);
  };
  document.querySelectorAll(".numbers").forEach((details) => details.addEventListener("toggle", () => {
    fill(details.parentElement.querySelector(".plot"));
  }));
  document.addEventListener("change", (event) => {
    if (event.target.matches("[data-select], [data-all]")) update();
  });
  document.addEventListener("click", (event) => {
    if (event.target.matches("th button")) sort(event.target);
    if (event.target.matches("[data-copy], [data-copy-table]")) copy(event.target);
  });
  document.querySelectorAll("section > details").forEach((details) => details.addEventListener("toggle", update));
  for (const query of [narrow, dark]) query.addEventListener("change", update);
  update();
})();

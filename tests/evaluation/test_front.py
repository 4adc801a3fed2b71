from specheads.evaluation.page.figures import ALL, FrontPoint, front_figures, front_table, not_beaten

LOADS = {
    "1 at once": [FrontPoint("slow", 10.0, 10.0), FrontPoint("<fast>", 30.0, 30.0)],
    "8 at once": [FrontPoint("slow", 8.0, 60.0), FrontPoint("<fast>", 9.0, 40.0), FrontPoint("lossy", 7.0, 50.0, lossless=False)],
}


def test_the_front_has_the_rows_that_no_other_beats():
    rows = [(3, 1), (1, 3), (2, 2), (2, 3), (4, 1)]
    assert not_beaten(rows, lambda row: row) == [(1, 3), (2, 2), (3, 1)]


def test_every_load_has_a_figure_with_its_front_and_one_shows_all():
    figures = front_figures(LOADS)
    assert list(figures) == [ALL, "0", "1"]
    lines = {trace.name: (list(trace.x), list(trace.y)) for trace in figures[ALL].data}
    assert lines["slow"] == ([10.0, 8.0], [10.0, 60.0]) and lines["&lt;fast&gt;"] == ([30.0, 9.0], [30.0, 40.0])
    front, *points = figures["1"].data
    assert (list(front.x), list(front.y)) == ([9.0, 8.0], [40.0, 60.0])
    assert [trace.name for trace in points] == ["slow", "&lt;fast&gt;", "lossy"]
    assert [trace.line.dash for trace in points] == ["solid", "solid", "dash"]
    assert points[0].marker.color == figures[ALL].data[0].marker.color


def test_the_table_of_all_loads_leaves_out_what_is_not_known():
    table = front_table(LOADS, "a caption")
    assert table.columns == ("", "1 at once", "8 at once")
    cells = {row.cells[0].text: [(cell.text, cell.limits) for cell in row.cells[1:]] for row in table.rows}
    assert cells["slow"] == [("10", "(10.0)"), ("60", "(8.0)")] and cells["lossy"] == [(None, None), ("50", "(7.0)")]

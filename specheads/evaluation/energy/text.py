"""What a report says of energy."""

from specheads.evaluation.report import Report


def has_energy(report: Report) -> bool:
    """Whether the energy of every setting was measured."""
    return bool(report.live) and all(row.energy for row in report.live)


def energy_text(report: Report) -> str | None:
    """Return what joules per token count, and how exactly, or why they cannot be measured; None where nothing was decoded."""
    context = report.context.get("energy")
    if context is None or not report.live:
        return None
    if "not_measurable" in context:
        return f"Energy is not measurable here: {context['not_measurable']}"
    idle, error = context["idle"], max(row.energy.resolution_error for row in report.live if row.energy)
    return (
        f"Joules per token are of whole responses, with the reading of prompts, by {', '.join(context['counters'])}; above idle: "
        f"without the {idle['watts']:.3g} W of the idle machine, measured for {idle['seconds']:g} s before decoding. The counter "
        f"moves every {1e3 * idle['update_seconds']:.3g} ms, which leaves the sums uncertain by \u00b1{100 * error:.2g} %."
    )

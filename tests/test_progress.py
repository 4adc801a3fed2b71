"""What is shown of work, by a clock that the tests move."""

import logging
from io import StringIO

import pytest
from rich.console import Console

from specheads.progress import Display, Work, duration, rough_duration


class Hand:
    """A clock that stands still until it is moved."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Hand()


def advanced(clock, total, points):
    """A work of which so much is done after so many seconds."""
    work = Work("decoding", total, clock)
    began = clock.now
    for seconds, done in points:
        clock.now = began + seconds
        work.advance(done - work.done)
    return work


def shown(display, width):
    """The line of what runs, without its bar."""
    console = Console(width=width, file=StringIO(), force_terminal=True, color_system=None)
    with console.capture() as capture:
        console.print(display.line(width))
    line = capture.get().rstrip("\n")
    assert len(line) <= width
    return " ".join(line.replace("━", " ").replace("╸", " ").replace("╺", " ").split())


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "10 s"),
        (0.2, "10 s"),
        (60, "60 s"),
        (61, "70 s"),
        (110, "110 s"),
        (111, "2 min"),
        (3540, "59 min"),
        (3600, "1 h 0 min"),
        (7261, "2 h 2 min"),
    ],
)
def test_a_remaining_time_is_rounded_up_and_never_nothing(seconds, text):
    assert rough_duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (9.94, "9.9 s"), (59.4, "59 s"), (61, "1 min 1 s"), (7261, "2 h 1 min")],
)
def test_durations_are_as_exact_as_people_read_them(seconds, text):
    assert duration(seconds) == text


def test_the_pace_is_that_of_the_last_half_of_the_time(clock):
    """One in the first ten seconds, three in each of the next ten."""
    work = advanced(clock, 70, [(0, 0), (10, 1), (20, 4), (30, 7)])
    assert work.seconds_left() == pytest.approx(63 / 6 * 20)
    assert work.text() == "10 %, about 4 min left"
    clock.now += 5.0  # the next step is due in five seconds more
    assert work.seconds_left() == pytest.approx(63 / 6 * 20 - 5)


def test_a_pace_is_known_after_two_seconds_and_until_a_step_is_late(clock):
    assert advanced(clock, 50, [(0, 1)]).seconds_left() is None
    assert advanced(clock, 50, [(0, 1), (1.9, 2)]).seconds_left() is None
    work = advanced(clock, 50, [(0, 1), (2, 2), (4, 3)])
    assert work.seconds_left() is not None
    clock.now += 30.0
    assert work.seconds_left() is None
    assert work.text() == "6 %, 34 s so far"


def test_a_time_is_never_zero_while_something_is_left(clock):
    work = advanced(clock, 236, [(second, 2 * second) for second in range(24)])
    for _ in range(400):
        clock.now += 0.5
        assert (
            "0 s" not in work.text().split(", ")[-1].split()
            and "left" in work.text()
            or ("so far" in work.text())
        )
    work.advance(236 - work.done)
    assert work.text() == "finishing"


def test_a_total_that_was_only_the_most_is_corrected_and_shares_add_up(clock):
    work = Work("responses", 1000, clock)
    work.advance(10, left=30)
    assert work.text().startswith("25 %")
    for _ in range(3):
        work.advance(10)
    assert work.text() == "finishing"
    shares = Work("reading", 1, clock)
    for _ in range(10):
        shares.advance(0.1)
    assert shares.done == 1
    assert Work("features", 0, clock).text() == "finishing"  # there is nothing to do


def test_the_log_gets_the_remaining_time_after_ten_seconds_and_every_half_minute(clock, caplog):
    display = Display(clock=clock)
    lines = []
    with caplog.at_level(logging.INFO), display.work("recording", 100) as work:
        for _ in range(80):
            clock.now += 1.0
            work.advance(1)
            if line := work.line_for_log():
                lines.append(line)
    assert lines == [
        "recording: 10 %, about 90 s left",
        "recording: 40 %, about 60 s left",
        "recording: 70 %, about 30 s left",
    ]


@pytest.mark.parametrize("width", [80, 120])
def test_a_line_names_the_stage_and_what_it_does_now(clock, width):
    display = Display(clock=clock)
    assert shown(display, width) == ""
    with display.stage("recording"):
        clock.now += 12.0
        assert shown(display, width) == "recording 12 s"
        with display.work("drafts", 200) as work:
            work.advance(20)
            assert shown(display, width) == "recording drafts, 10 %, 0.0 s so far"
            waited = "compiling decoding steps (3 of 9), once per machine"
            with display.work(waited, None):
                clock.now += 75.0
                assert shown(display, width) == f"recording {waited}, 1 min 15 s"
            assert shown(display, width).startswith("recording drafts, 10 %")
        assert shown(display, width) == "recording 1 min 27 s"


def printed(tells, is_terminal, run):
    """What a display prints while a function works."""
    output = StringIO()
    console = Console(width=100, file=output, force_terminal=is_terminal, color_system=None)
    clock = Hand()
    display = Display(console, clock)
    display.tells = tells
    run(display, clock)
    return output.getvalue()


def two_stages(display, clock):
    with display.stage("responses") as say:
        clock.now += 90.0
        with display.stage("labels"):  # of the same stage for who looks on
            clock.now += 1.0
        say("1,096 of the target")
    display.finished("features", "reused from data/features")


def test_without_a_terminal_there_is_one_line_for_each_stage_that_is_done():
    lines = printed(True, False, two_stages).splitlines()
    assert [" ".join(line.split()) for line in lines] == [
        "responses 1,096 of the target 1 min 31 s",
        "features reused from data/features",
    ]


def test_a_library_prints_no_lines_of_stages():
    assert printed(False, False, two_stages) == ""


def test_a_terminal_keeps_the_lines_of_stages_alone():
    text = printed(True, True, two_stages)
    *_, first, second = (line for line in text.splitlines() if line.strip())
    assert "responses    1,096 of the target" in first and second.startswith("features")


def test_a_stage_that_fails_has_no_line_and_leaves_nothing_running(clock):
    def fail(display, clock):
        def heads():
            with display.stage("heads"):
                display.work("training", 5).__enter__()  # its end is never reached
                raise ValueError("NaN")

        with pytest.raises(ValueError, match="NaN"):
            heads()
        with display.stage("calibration") as say:
            say("on dev prompts")

    (line,) = printed(True, False, fail).splitlines()
    assert line.split()[0] == "calibration"


def test_each_warning_is_printed_once(capsys):
    from specheads.progress import Warnings

    log = logging.getLogger("specheads.test_of_warnings")
    handler = Warnings()
    log.addHandler(handler)
    log.propagate = False
    for _ in range(2):
        log.warning("only %d prompts", 3)
        log.info("12 MB of memory")
    log.warning("only 4 prompts")
    log.removeHandler(handler)
    assert capsys.readouterr().out.splitlines() == [
        "warning: only 3 prompts",
        "warning: only 4 prompts",
    ]

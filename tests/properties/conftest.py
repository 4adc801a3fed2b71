"""Counts how many examples each property was tried with.

`python -m tests.properties` prints the counts.
"""

from functools import wraps

import pytest

TRIED = "examples tried"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    given = getattr(getattr(item, "obj", None), "hypothesis", None)
    if given is None:
        return (yield)
    inner = given.inner_test
    tried = [0]

    @wraps(inner)
    def counted(*args, **kwargs):
        tried[0] += 1
        return inner(*args, **kwargs)

    given.inner_test = counted
    try:
        return (yield)
    finally:
        given.inner_test = inner
        item.user_properties.append((TRIED, tried[0]))


def pytest_terminal_summary(terminalreporter):
    reports = [
        report
        for name in ("passed", "failed")
        for report in terminalreporter.getreports(name)
        if report.when == "call"
    ]
    tried = [
        (report.nodeid, value)
        for report in reports
        for name, value in report.user_properties
        if name == TRIED
    ]
    if tried:
        # One that is tried with every pairing is one.
        properties = {test.partition("[")[0] for test, _ in tried}
        terminalreporter.write_line(
            f"{len(properties)} properties, {sum(count for _, count in tried):,} examples tried"
        )

"""Current operation of a process."""

import pytest

from raymm.actors.faults.task_tracker import Report, TaskTracker, task
from raymm.scheduler.program.program import Op


class Instruction:
    op, stage = Op.FORWARD, "llm.1"


def test_instructions_are_described_and_measured_by_kind():
    tracker = TaskTracker(lambda instruction: f"forward of {instruction.stage}")
    assert str(tracker.report()) == "has no work"
    with tracker.during("a step"):
        assert tracker.report().doing == "a step"
        tracker.enter(Instruction())
        report = tracker.report()
        assert report.doing == "forward of llm.1" and not report.waits
        assert str(report).startswith("has been in forward of llm.1 for ")
        with tracker.in_thread("writing"):
            assert list(tracker.report().in_threads) == ["writing"]
    report = tracker.report()
    assert report.doing == "" and not report.in_threads
    assert set(report.longest) == {"a step", f"{Op.FORWARD} llm.1", "writing"}


def test_an_idle_process_reports_where_its_last_task_failed():
    tracker = TaskTracker(lambda _: "the forward")
    with pytest.raises(KeyError), tracker.during("a step"):
        tracker.enter(Instruction())
        raise KeyError("x")
    assert str(tracker.report()).startswith("gave up in the forward after ")
    with tracker.during("the next step"):
        pass
    assert str(tracker.report()) == "has no work"


def test_an_exit_of_user_code_is_an_error():
    class Actor:
        task_tracker = TaskTracker()

        @task("building")
        def build(self, code):
            raise SystemExit(code)

    with pytest.raises(RuntimeError, match=r"sys.exit\(3\) was called in building"):
        Actor().build(3)


def test_a_process_that_waits_says_so():
    assert str(Report("RECV of llm.0", 2.0, True)) == (
        "has waited for others in RECV of llm.0 for 2.0 s"
    )

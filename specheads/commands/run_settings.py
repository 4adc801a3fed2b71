"""The keys of a run, which every command has."""

from specheads.settings import Flag, Settings, Text, setting


class Paths(Settings):
    """The folders of a command."""

    data: Text = setting("data", "the folder of generated data, with one folder per fingerprint")
    outputs: Text = setting("outputs", "the folder of logs, checkpoints and results of every run")
    run: Text = setting("", "the folder of this run")


class RunSettings(Settings):
    """Where a command writes, and whether it resumes a run."""

    command: Text = setting("", "the name of the folder of runs in paths.outputs")
    task: Text = setting("head", "the task of specheads train: head or distill")
    resume: Flag | Text = setting(
        True,
        "true: resume the newest run of the same command if it is unfinished; false: start again; specheads train also takes a "
        "checkpoint to resume in a new folder",
    )
    paths: Paths = setting(Paths(), "the folders of a command")

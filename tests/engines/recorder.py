"""Stands in for what records CUDA graphs, on a CPU: what is replayed reads where it read."""


class Recorder:
    """Keeps the function itself.

    Attributes:
        replayed: how often something was, whoever recorded it.
    """

    replayed = 0

    def record(self, work):
        recording = Recorder()
        recording.replay = lambda: (setattr(Recorder, "replayed", Recorder.replayed + 1), work())
        return recording

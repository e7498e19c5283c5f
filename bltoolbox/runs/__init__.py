"""Run directories as files, read and written without torch: names, safe writing, locks, logs, history, settings.

What a figure of a log means to a reader belongs here (``metric``, ``budget``), how it is shown in ``reports`` or
``cli``. May import ``config``. A change here can break reading runs of earlier versions, and every command that reads
a run of another process.
"""

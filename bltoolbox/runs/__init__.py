"""Run directories as files, read and written without torch: names, safe writing, locks, logs, history, settings.

May import ``config``. A change here can break reading runs of earlier versions, and every command that reads a run
of another process.
"""

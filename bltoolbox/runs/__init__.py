"""Run directories as files, read and written without torch: names, safe writing, locks, logs, history, settings.

May import ``config``. A change here can break reading the runs of earlier versions, and every command that looks at a
run that it did not make itself.
"""

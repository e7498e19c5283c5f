"""Several processes that do one run, and the signals that stop them.

May import ``errors`` only. A change here can break that all ranks give the same answer, stop at the same call and fail
together.
"""

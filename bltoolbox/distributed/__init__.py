"""One run on several processes, and the signals that stop it.

May import ``errors`` only. A change here can break the agreement of ranks: that they give the same answer, stop at
the same call and fail together.
"""

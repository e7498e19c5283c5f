"""Everything people look at: the HTML report, figures, comparisons, notebooks, progress.

Reads records and run directories, never drives a run. May import ``restoration``, ``bilevel``, ``runs`` and
``config``. A change here can break pages and figures, and nothing else.
"""

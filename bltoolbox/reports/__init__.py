"""Everything people look at: the HTML report (``html``), figures, comparisons, notebooks, progress.

A new column, card or curve of the report belongs in ``html``, a new column of ``blt compare`` in ``compare``; what is
measured belongs in ``restoration.metrics``. Reads records and run directories, never drives a run. May import
``restoration``, ``bilevel``, ``runs`` and ``config``. A change here can break pages and figures, and nothing else.
"""

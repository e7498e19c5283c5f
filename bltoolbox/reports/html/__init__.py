"""``report.html``: one page about one or more runs that works offline in any browser.

``curves`` and ``facts`` read run directories without torch, ``pictures`` has images and filters, ``page`` puts them
together with the files in ``static/``. May import what ``reports`` may.
"""

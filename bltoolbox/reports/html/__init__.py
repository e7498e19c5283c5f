"""``report.html``: one page about one run or several that needs only a browser and never asks the network.

``curves`` and ``facts`` read run directories without torch, ``pictures`` has images and filters, ``page`` puts them
together with the files in ``static/``. May import what ``reports`` may.
"""

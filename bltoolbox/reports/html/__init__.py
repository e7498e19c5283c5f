"""``report.html``: one page about one or more runs that works offline in any browser.

``facts`` and ``curves`` read run directories without torch, ``tables`` has the columns, ``pictures`` images and
filters; ``page`` puts them together with the files in ``static/``, and ``build`` writes the page. May import what
``reports`` may. A change here can break pages in browsers, and the promise that a page sends no request and runs
nothing of a recipe.
"""

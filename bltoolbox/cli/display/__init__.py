"""What the commands print: tables, summaries, live views of sweeps and runs.

May import everything. A change here can break only the output for people.
"""

"""The fair queue under its former name; server/jobs.py imports it from here."""

from verbatim.schedule.fair_queue import FairQueue, Waiting

__all__ = ["FairQueue", "Waiting"]

"""Decisions about masters and sync state sets, as pure functions of values (ADR 0040).

    record.py         the group record, the only shared state
    sessions.py       heartbeats and their times; decisions see a GroupObservation
    failure.py        detection of a failed master
    registration.py   registration of a run that has started
    membership.py     a sync state set that a master proposes
    elect.py          the next master and its first sets
    decide.py         the decision: decide(record, sight) -> Intent
    swap.py           the outcome of a write
    leadership.py     the controller that acts first

A function takes a record and returns the next one, with a higher version, or the reason against
it. Functions do not wait, read clocks or keep state.
"""

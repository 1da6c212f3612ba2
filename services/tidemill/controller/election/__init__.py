"""Who is master, who is in sync, who may be elected: decisions as functions of values (ADR 0040).

    record.py         the group record, the one thing that is shared and changed
    sessions.py       what a controller has heard, and when: a Sight of it is what decisions see
    failure.py        whether the master has failed
    registration.py   a replica has started
    membership.py     a master proposes a sync state set
    elect.py          another master, and the sets that it begins with
    decide.py         all of it: decide(record, sight) -> Intent
    swap.py           what became of an attempt to write
    record_json.py    a record as a store keeps it
    leadership.py     which controller acts first

A function takes a record and returns the next one, which differs in its version, or says why not.
Nothing here waits, asks for the time, or remembers.
"""

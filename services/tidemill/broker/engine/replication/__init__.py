"""Replicas of one log: who may append, what is committed, where a log is cut (ADR 0040).

    Replication            one a process: which epoch was seen, which role it has
      ├── Master           one epoch: streams of replicas, sync state set, confirm offset
      │     SyncState      members, what was proposed, acks
      │     Transfer       hand over without a failure
      └── Replica          one epoch: follow a master, cut what it does not have

Events go in by methods, with the time; what is to be done outside comes out of `take_actions`. Log
and facts (`replicated_log.py`) are handed in, as the disk is to the engine, and called in place.
"""

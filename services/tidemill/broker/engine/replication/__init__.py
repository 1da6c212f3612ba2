"""Replication of one log: epochs, the confirm offset and cuts (ADR 0040).

    Replication            one per process: the epoch seen, and the role in this epoch
      ├── Master           one epoch: streams of replicas, sync state set, confirm offset
      │     SyncState      members, proposals, acks
      │     Transfer       planned hand-over
      └── Replica          one epoch: follow a master, cut the log, append frames

The caller passes events and the time to methods, and carries out the actions of `take_actions`.
These machines call the log (`replicated_log.py`) directly, as the engine calls the disk.
"""

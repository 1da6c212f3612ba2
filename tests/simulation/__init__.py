"""All processes of a broker group in one process, on virtual time, in an order that a seed chooses.

    loop       the event loop: it runs ready callbacks in random order; if none is ready, the time
               jumps to the next timer
    network    links between proxies and brokers, with delays; a link can end at any moment
    processes  brokers over faulty disks, and proxies; a test can kill each and set its clock
    clients    producers and consumers that record their history
    gaps       a short retention, and an operator who resets consumer groups and asks questions
    push       consumers that process messages for minutes
    run        one seed with its verdict: `python -m tests.simulation.run --seeds 200`
    replica_*  replicas, controllers and their store: `tests.simulation.replica_group`

The same seed repeats the same run, callback by callback.
"""

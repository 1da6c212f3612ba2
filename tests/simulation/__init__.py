"""A broker group's processes in one, on virtual time, in an order that a seed chooses.

    loop       an event loop without I/O: it runs what is ready in a random order, and when nothing
               is, time jumps to the next timer
    network    links between proxies and brokers: delays, and ends at any moment
    processes  a broker over a faulty disk, a proxy; each can be killed, clocks are their own
    clients    producers and consumers, whose histories are judged
    push       consumers that work for minutes, in a run of their own
    run        one seed from its begin to its verdict; `python -m tests.simulation.run --seeds 200`

A seed says it all: the same seed is the same run, operation by operation.
"""

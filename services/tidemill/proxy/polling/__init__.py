"""Pop with notify: receives that wait for messages at several broker groups (ADR 0026).

    polling            all polls of this proxy: events in, actions out; interface of the pure part
      pair             the polls of one consumer group on one topic: waiting, parked
        poll           one receive
        notifications  one notification per broker for all polls of a pair
      level_order      order of the brokers of a PRIORITY topic
      mode             notifications for a few polls, parked pops for many
      timers           due times
    counts             counters of polls
    shell              carries out the actions on links
    single_receive     receive at the only broker group

All modules except the last two are pure: they do no I/O, and time is a parameter.
"""

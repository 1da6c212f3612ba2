"""Pop with notify: how receives wait for messages at several broker groups (ADR 0026).

    polling        all polls of this proxy: events in, actions out; the face of what is pure
      pair         those of one group on one topic: who waits, who is parked
        poll       one receive
        notifications  what one broker is asked for all of them
      mode         when many polls are better parked than notified
      timers       who is to be looked at when
    counts         what is counted of it all
    shell          carries the actions out on links

All but `shell` is without I/O, and is told what time it is.
"""

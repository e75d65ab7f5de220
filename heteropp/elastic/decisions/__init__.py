"""Decides which generation of an elastic job trains, and does nothing itself.

What happens comes in as an event, and what is to be done goes out as commands:

    state, commands = react(state, event)

Nothing here reads a clock, a file or a store, or starts a thread, so that a test can play any
course of events. `heteropp.elastic.launcher.leader` finds out what happens, and does what is to be
done. To be read in this order:

    events      what can happen
    commands    what can be asked for
    phases      what the leader waits for, one phase at a time
    state       all that is known of the job: its phase, and the rest in roster, history, awaited
    reaction    one event being worked through: what several events have in common
    news        what each event changes at once
    fences      the end of all members, and whether the job goes on after it
    turns       what is decided when all news have been heard, phase by phase
    machine     `react` itself, and the state that a job begins with
"""

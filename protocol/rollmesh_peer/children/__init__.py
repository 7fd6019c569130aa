"""Child processes: framed msgpack pipes, supervision, and the scorer that runs hostile answers in a sandbox.

- ``frames``: what a frame is (both sides)
- ``child``: the child's side, ``run_child``; no trio, no torch
- ``launch``: how a process is started and ended
- ``process``: the daemon's side, ``open_child``, ``Child.call``, ``Child.stream``
- ``failure``: exits, signals and last words as sentences
- ``supervisor``: keeps one child alive, with back-off
- ``plugins``: finds environments by entry point or module path
- ``scoring``: the daemon's view of the scoring child; ``score``: what scoring gives
- ``scorer``: the scoring child itself, and ``zygote``, the process in it that forks
- ``sandbox``, ``confinement``, ``landlock``, ``seccomp``, ``linux``: how an answer is kept from everything
"""

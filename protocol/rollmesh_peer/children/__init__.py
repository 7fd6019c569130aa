"""Child processes: framed msgpack pipes, supervision, and the scorer that runs hostile answers in a sandbox.

    frames       what a frame is (both sides)
    child        the child's side: ``run_child``; no trio, no torch
    process      the daemon's side: ``open_child``, ``Child.call``, ``Child.stream``
    supervisor   keeps one child alive, with back-off
    plugins      finds environments by entry point or module path
    scoring      the daemon's view of the scoring child
    scorer       the scoring child itself
    sandbox, confinement, seccomp, landlock   how an answer is kept from everything
"""

"""What leaves when: the plan, the prediction of the save step, the window's life.

In the order of their imports:

    cost         what a plan costs, on numbers alone
    choice       the plan that costs least
    units        what may leave as one
    facts        what a plan rests on beside the program and the device budget
    plan         what leaves when
    departure    what leaves at one version, and what follows
    planned      a step's plan, and its departures
    predict      which update will be saved
    processes    what processes tell each other
    agreement    what must be so on all of them before a step runs armed
    worker       the threads beside the trainer's
    clock        how long a step takes
    device_budget  what copies may take of a device
    host_budget  what saves hold on the host, and what there is room for
    resources    what windows and saves share
    slots        where the writer will find a chunk
    landing      how what was staged comes to the host
    landed       what has landed of a leaf, which becomes its shards again
    late         chunks that are staged at the sealed version
    known        the facts of a plan: said, learned, agreed on by all processes
    ahead        what windows run is compiled long before
    planner      plans, made once and anew
    ran          the steps that have run, and the states that they returned
    early        chunks that left before, replayed until the seal
    audit        samples, against what replay made of them
    late_groups  what became late inside a window
    step_room    room on the device for what armed steps retain
    open_window  one window between its opening and its seal
    failures     how a failed save reaches the trainer
    current      the window that is open, and how it ends
    opener       when one opens
    seal         a save at its seal, item by item
    advice       what is said where saves could be windows
    session      the life of windows
    face         what a user sees of them
"""

"""What touches the user's step: the trace, the cut, the armed step, the markers.

In the order of their imports. What a step computes, and what a compiler may make of it:

    primitives   what is known of JAX's primitives by their names
    values       the values of a traced step, and what makes them
    erased       of which operations the compiler makes nothing
    drawn        what number a value is
    numbers      which the compiler knows, which may be one, which flags are always the same
    parts        which parts of what was put together it knows
    made         what operations give, and whether it knows that at once
    apart        which sums the compiler takes apart
    factors      what a factor may be seen to be
    hidden       of which operations they see more than we do
    common_factors  sums of which they make one product
    merging      what compilers merge
    scattered    what they scatter into a sum

Where it is cut, so that the host can go on from there:

    bodies       what calls run
    handed_on    what loops hand on as it was given
    graph        the traced step as one flat graph of values
    exact        which operations the host repeats bit for bit
    walk         from a leaf's new value back to what it cannot repeat
    flow         minimum cuts
    cut          where to cut a step
    recipe       what follows the cut, as data

One program: a traced step, and what runs in its place inside windows:

    places       where a user says the state is
    call         where the state is among a step's arguments and results
    step_cut     what stays of a cut once the graph is dropped
    armed        the user's program with the cut values as further results
    signature    what `jax.jit` tells programs apart by
    returned     the new state among what a step returned
    last_result  what a step has returned last
    unarmable    what cannot be armed, and why
    program      one traced step: its state, its cut, its armed executable

One step: all its programs, and what the user calls:

    stand_in     what is called in place of a function
    kinds        which programs a step has at once, and when one more is traced
    traced       a step and its programs, one for each kind of its calls
    wrapped      the wrapped step: counted, and armed inside windows
    nested       steps whose `jax.jit` lies inside another object
    wrap         what `wrap` makes of a step

What the user may write for it, and need not:

    jit          `jax.jit` for functions of more than arrays
    markers      which values are the gradients, where the user says so
"""

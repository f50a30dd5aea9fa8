"""Steps of a stage that are launched before the host has read the verification of the step before.

Without this package, a GPU idles between two steps while the host reads the target tokens, makes the result,
composes the next frame and launches it:

    host     compose k | launch k | wait ....... | read k | result k | compose k+1 | launch k+1 | wait
    device                  [====== step k ======]                                     [==== step k+1 ==

The package predicts the next frame and launches its step as soon as what it needs is known. There are three
ways, by where the tokens of the next step come from.

1. Without drafts, every sequence feeds its one new token (`NextStep.predict`, `launch`). The step is launched
   once the tokens are known, before the result is made:

    host     launch k | prepare k+1 | wait ..... | read k | launch k+1 | result k | compose k+1
    device      [========== step k ==============]             [============ step k+1 ==============

2. The drafter grows trees, and the host selects their nodes (`DraftedStep.prepare`, `launch_or_confirm`). The
   step is prepared while the trees grow, with the shapes of the last trees:

    host     launch k | wait . | read k | result k | grow trees | prepare k+1 | read trees | launch k+1
    device      [=== step k ===]                       [====== grow trees ======]               [== k+1 ==

3. The device verifies, grows and selects by itself (`DraftedStep.launch_selected`, `launch_or_confirm`). The
   step is launched with trees that the host has not read, and confirmed when the host has read them:

    host     launch k | start_drafts | wait | read k | launch k+1 | result k | read trees | confirm k+1
    device      [========= step k ==========][==== grow trees ====][ select ][======= step k+1 ==========

    Legend: k is a step. [===] is work of the device. `read k`: the host waits for the target tokens of step
    k. `start_drafts`, `grow trees`, `read trees`: the drafter on the same thread (`ColocatedDrafts`). After
    the last column the sequencer composes frame k+1. If it is the predicted frame, the stage uses the
    outputs of the step that is running already.

A step has the states of `specsot.core.overlap`:

    state      a step of this package                                           leads to
    IDLE       its segments may be known; nothing is reserved                   PREPARED
    PREPARED   pages are reserved, positions and slots are on the device        LAUNCHED, DISCARDED
    LAUNCHED   it runs with trees that the host has not read (way 3)            CONFIRMED, DISCARDED
    CONFIRMED  it runs, and its tokens are those of the results (all ways)      IDLE by its frame, DISCARDED
    DISCARDED  another frame arrived                                            IDLE

A frame may carry prompts in addition to the predicted trees, if a step of one pass was launched for these.
The prompts are then computed in a pass of their own after the step:

    host     launch k+1 | result k | compose k+1 with prompts | launch prompts | wait | read k+1
    device   [====== step k+1 ======][== prompts ==]

If another frame arrives than the predicted one, the step is discarded: its pages are given back, nothing is
sent because of it, and the KV that it wrote is overwritten. One thing is permanent: pages that a window hides
from the predicted tokens on are freed.

`async_verify` overlaps in another way: on a last stage that is not also the first, a thread of its own
verifies a frame while the stage launches the next frame that arrived. Nothing is predicted there.

The package knows neither the stage nor the verifier nor the worker; they use it. All of it runs on the thread
that runs frames, except `async_verify`.
"""

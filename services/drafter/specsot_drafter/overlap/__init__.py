"""Draft trees that grow before the host has read the verification result that they follow.

Without this package, a GPU idles while the host reads which tokens were accepted, sends the features to the
drafter and launches the next trees:

    host     launch k | wait ...... | read k | features k | launch trees | wait ........... | read trees
    device      [===== step k ======]                        [======= grow trees =======]

With it, the device finds out by itself which tokens it accepted, and grows the trees from them. Everything
else that growth needs (pages, slots, tables) is sent while the device still computes the step:

    host     launch k | start_drafts | wait | read k | features k | read trees
    device      [========= step k ==========][====== grow trees ======]

If the number of nodes is fixed beforehand, the device also selects the nodes. Then the step that verifies the
trees is launched before the host has read them (way 3 in `specsot_worker.overlap`):

    host     launch k | start_drafts | wait | read k | select | launch k+1 | features k | read trees
    device      [========= step k ==========][====== grow trees ======][ select ][===== step k+1 =======

    Legend: k is a step. [===] is work of the device. `read k`: the host waits for the target tokens of step
    k. `start_drafts` and `select` are methods of `ColocatedDrafter` and `DraftHandle`, which the verifier
    calls on this thread; `DraftHandle.result` is `features k` and `read trees`
    (`specsot.core.device_verification`).

EAGLE heads and small language models grow trees asynchronously if their trees grow in captured graphs
(`specsot_drafter.proposers.trees`). An EAGLE head also reads the features of the step that is being verified;
they are on the device already.

`result` compares what the device accepted with the host's own verification result. If they differ, the trees
are discarded and grown again from the host's result, so that drafts never depend on the overlap.

A growth (`DeviceGrowth`) and a selection of nodes (`DeviceChoice`) have the states of `specsot.core.overlap`:

    state      a growth                                        a selection
    IDLE       (never: it is made when it is launched)         (never)
    PREPARED   (only while it is being launched)               the number of nodes is fixed
    LAUNCHED   the graph runs; `DraftHandle.discard` may come  a step that reads the nodes is launched
    CONFIRMED  `Proposer.begin` continues exactly these trees  the drafts consist of these nodes
    DISCARDED  the host's result differs, or other sequences   (never: it is dropped with its growth)
               request trees

    colocated          the protocol with the verifier; errors stay with the drafter
    device_growth      growths, and the trees that the device verifies for them
    device_selection   selections
    graph_growth       whole trees in one captured graph, from tables of the host or of the device

The speculator decides whether trees grow asynchronously and how many nodes are selected; the package does it.
"""

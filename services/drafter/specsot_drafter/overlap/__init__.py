"""Draft trees that grow before the host has read the verification result that they follow.

Without this room, a GPU idles while the host reads which tokens were accepted, sends the features to the
drafter and launches the next trees:

    host     launch k | wait ....| read k | result k | features k | grow trees | wait ..........| read trees
    device      [==== step k ====]                                     [==== trees k+1 ====]

With it, the device finds out by itself which tokens it accepted, and grows the trees from them. Everything
else that growth needs (pages, slots, tables) is sent while the device still computes the step:

    host     launch k | start_drafts | wait | read k | result k | result(features k) = reads trees
    device      [======== step k =======][= verify =][====== trees k+1 ======]
                                                    ^ select: the device also selects the nodes, and the next
                                                      step is launched before `result` (see the worker's room)

    Legend: k is a step. [===] is work of the device. `start_drafts`, `select`, `result`: the methods of
    `ColocatedDrafter` and `DraftHandle` (`specsot.core.device_verification`), which the verifier calls on this thread.

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

The speculator decides whether trees grow asynchronously and how many nodes are selected; the room does it.
"""

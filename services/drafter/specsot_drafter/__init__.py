"""The drafter: proposes trees of tokens for the ring to verify.

It may be late, wrong or gone, and no answer changes. Refuses to know text and the base's layers; `core`
refuses to know tensors, clocks and links.
"""

"""The drafter: proposes trees of tokens, which the ring verifies.

No answer changes if the drafter is late, wrong or lost. The drafter knows neither text nor the layers of the
base model; its `core` knows neither tensors nor clocks nor links.
"""

"""Several complete rings behind one master: requests go to the least loaded, workers to where one is missing.

Refuses to know tensors, text and doors. A master with one ring needs nothing of it but `Replica`.
"""

from specsot_master.replicas.enrolment import Enrolment
from specsot_master.replicas.replica import Replica
from specsot_master.replicas.router import Router
from specsot_master.replicas.sums import sum_up

__all__ = ["Enrolment", "Replica", "Router", "sum_up"]

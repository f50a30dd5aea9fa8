"""Several complete rings behind one master: requests go to the least loaded, workers to where one is missing.

Refuses to know tensors, text and doors. A master with one ring needs nothing of it but `Replica`.
"""

from specsot_master.replicas.enrolment import MemberRouter
from specsot_master.replicas.replica import Replica
from specsot_master.replicas.router import RequestRouter
from specsot_master.replicas.sums import total_info

__all__ = ["MemberRouter", "Replica", "RequestRouter", "total_info"]

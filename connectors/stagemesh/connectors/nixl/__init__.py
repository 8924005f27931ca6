"""The nixl connector: a consumer reads a producer's arena into its own memory, with RDMA if the hosts support it.

`connector` implements the connector interface, and `offer` defines the message from the producer to the consumer.
`remote_arena` reads one producer's arena. `transfer_plan` converts ranges to transfers, `remote_reads` schedules the
transfers from one producer, `read_thread` runs the transfers from all producers, and `agent` wraps the nixl library.
"""

from stagemesh.connectors.nixl.connector import NixlConnector, NixlReader
from stagemesh.connectors.nixl.environment import describe

__all__ = ["NixlConnector", "NixlReader", "describe"]

"""The nixl connector, through which a consumer copies ranges of a producer's arena into the consumer's own memory.

The transfers use RDMA if both hosts support it. `connector` implements the connector interface, defines the offer of a
producer and plans the transfers of a fetch. `reads` schedules and runs the transfers from all producers, and `agent`
wraps the nixl library.
"""

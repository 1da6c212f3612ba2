"""What the processes of Tidemill share about gRPC.

`stubs` is generated from proto/ by `make proto` and not in the repository:

    tidemill.common.rpc.stubs.apache.rocketmq.v2.{definition,service,admin}_pb2
    tidemill.common.rpc.stubs.tidemill.broker.v1.broker_pb2, broker_pb2_grpc
"""

"""Messages as every process handles them: rules, encoding, names and handles.

rules             which messages are accepted          queue_choice      the queue of a message
encoding          a protocol message to a stored one   stored_message    the stored bytes wire
protobuf fields as bytes             resource_names    topics and consumer groups receipt_handle
proof of one delivery                recall_handle     proof of one schedule
"""

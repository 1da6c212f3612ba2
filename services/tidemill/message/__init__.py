"""Messages as every process of Tidemill knows them: rules, encoding, names and handles.

rules             which messages are taken             queue_choice      where one goes
encoding          a protocol message to a stored one   stored_message    the bytes that are kept
wire              protobuf fields as bytes             resource_names    topics and groups
receipt_handle    proof of one delivery                recall_handle     proof of one schedule
"""

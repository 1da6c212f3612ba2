"""The engine and the files of one replica of a broker group."""

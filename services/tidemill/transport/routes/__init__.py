"""The addresses of the masters of broker groups, for processes that call them.

masters         what is known, and the address to dial; without I/O
route_file      the routes as a file, for a start without controllers
master_routes   streams of routes from controllers, and listeners of each move
"""

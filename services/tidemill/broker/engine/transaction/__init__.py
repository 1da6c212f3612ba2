"""Transactional messages: half messages, their checks and their results (ADR 0085).

Transactions       the commands of clients and operators, and the due checks
├── TransactionTable   open half messages and remembered results; the fold changes it
└── CheckSchedule      the deadlines of checks, at the master only
"""

"""Custody without tokens: events, lineage, receipts, verification, and the gate."""

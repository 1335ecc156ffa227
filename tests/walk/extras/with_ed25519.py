# walk: './fenced[ed25519]'
"""A signer between trust domains."""

import secrets

import fenced
from fenced.proofs import Ed25519Key, verify

key = Ed25519Key("partner-1", secrets.token_bytes(32))
with fenced.Client("sqlite:///leases.db").hold("orders/42") as lease:
    proof = key.sign(lease.announcement())
assert verify(proof, [key.public()])

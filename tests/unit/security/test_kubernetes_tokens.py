"""Tokens of Kubernetes service accounts: each check with its edge, and forged tokens."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from tests.support.clocks import ManualClock
from tests.support.issuer import (
    AUDIENCE,
    ISSUER,
    NOW_S,
    base64url,
    claims_of,
    jwk,
    key_set,
    p256_key,
    part,
    rsa_key,
    signature_of,
    token,
)
from tidemill.common.errors import (
    BadRequest,
    KeyMissing,
    Overloaded,
    TokenEnded,
    Unauthorized,
    WrongCredentials,
)
from tidemill.security import kubernetes_tokens
from tidemill.security.failure_buckets import CHECKS_MAX, CHECKS_REFILL_MS, SignatureChecks
from tidemill.security.identities import check_account
from tidemill.security.json_web_keys import IssuerKey, KeySet, parse_key_set
from tidemill.security.kubernetes_tokens import (
    DURATION_S_MAX,
    LEEWAY_S,
    PART_CHARS_MAX,
    TOKEN_BYTES_MAX,
    WRONG,
    KubernetesTokens,
    has_shape,
)

RSA, P256 = jwk(rsa_key()), jwk(p256_key(), "k2")


class Check:
    """The check of tokens with some keys, at one time."""

    def __init__(self, *keys: dict[str, Any]) -> None:
        self.keys: KeySet | None = parse_key_set(key_set(*(keys or (RSA, P256))))
        self.clock = ManualClock()
        limit = SignatureChecks(self.clock.monotonic_ms)
        self.tokens = KubernetesTokens(ISSUER, AUDIENCE, lambda: self.keys, limit)
        self.now_ms = NOW_S * 1_000

    def account(self, text: str, address: str = "10.0.0.1") -> str:
        return self.tokens.verify(text, address=address, now_ms=self.now_ms).account

    def refusal(self, text: str, address: str = "10.0.0.1") -> str:
        with pytest.raises(Unauthorized) as refused:
            self.account(text, address)
        return refused.value.message


def refusal_of(**claims: Any) -> str:
    return Check().refusal(token(claims_of(**claims)))


@pytest.mark.parametrize("key", [rsa_key(), p256_key()], ids=["RS256", "ES256"])
def test_a_token_proves_its_service_account(key: Any) -> None:
    key_id = "k1" if key is rsa_key() else "k2"
    made = token(key=key, kid=key_id)
    verified = Check().tokens.verify(made, address="", now_ms=NOW_S * 1_000)
    assert verified.account == "shop/orders"
    assert verified.not_after_ms == (NOW_S + 3_600 + LEEWAY_S) * 1_000


# ---------------------------------------------------------------- claims


@pytest.mark.parametrize("claim", ["iss", "aud", "exp", "nbf", "iat", "sub", "kubernetes.io"])
def test_each_claim_is_needed(claim: str) -> None:
    assert refusal_of(**{claim: None})


@pytest.mark.parametrize(
    "issuer", [ISSUER + "/", ISSUER.upper(), "", ISSUER[:-1], [ISSUER], {"iss": ISSUER}]
)
def test_another_issuer_is_refused(issuer: object) -> None:
    assert "issuer" in refusal_of(iss=issuer)


@pytest.mark.parametrize("audience", [AUDIENCE, [AUDIENCE], ["other", AUDIENCE]])
def test_one_of_the_audiences_is_enough(audience: object) -> None:
    assert Check().account(token(claims_of(aud=audience))) == "shop/orders"


@pytest.mark.parametrize(
    "audience", ["other", [], "", "tidemill2", ["other"], {AUDIENCE: 1}, [[AUDIENCE]], 1]
)
def test_a_token_for_another_audience_is_refused(audience: object) -> None:
    assert "audience tidemill" in refusal_of(aud=audience)


def test_a_token_ends_after_its_leeway() -> None:
    check, made = Check(), token()
    for _ in range(2):  # The second one is of a token that is remembered.
        check.now_ms = (NOW_S + 3_600 + LEEWAY_S) * 1_000
        assert check.account(made)
        check.now_ms += 1
        with pytest.raises(TokenEnded, match="has ended"):
            check.account(made)
    fresh = Check()
    fresh.now_ms = check.now_ms
    assert fresh.refusal(made) == "the Kubernetes token has ended"


def test_a_token_begins_before_its_time_by_the_leeway() -> None:
    check, made = Check(), token()
    check.now_ms = (NOW_S - LEEWAY_S) * 1_000 - 1
    assert "not valid yet" in check.refusal(made)
    check.now_ms += 1
    assert check.account(made)


def test_a_token_of_more_than_a_day_is_refused() -> None:
    assert Check().account(token(claims_of(exp=NOW_S + DURATION_S_MAX)))
    assert "at most 86400 s" in refusal_of(exp=NOW_S + DURATION_S_MAX + 1)


@pytest.mark.parametrize("name", ["exp", "nbf", "iat"])
@pytest.mark.parametrize("value", ["1000000", 1e6, True, -1, 1 << 40, [1], None])
def test_times_are_whole_numbers(name: str, value: object) -> None:
    assert "no valid times" in refusal_of(**{name: value})


@pytest.mark.parametrize(
    "subject",
    [
        "shop/orders",
        "system:serviceaccount:shop",
        "system:serviceaccount:shop:orders:x",
        "system:serviceaccount:shop:",
        "system:serviceaccount::orders",
        "system:serviceaccount:Shop:orders",
        "system:serviceaccount:shop:orders\n",
        "system:node:shop:orders",
        f"system:serviceaccount:{'n' * 64}:orders",
        f"system:serviceaccount:shop:{'n' * 254}",
        ["system:serviceaccount:shop:orders"],
    ],
)
def test_a_token_of_another_subject_is_refused(subject: object) -> None:
    assert "not that of a service account" in refusal_of(sub=subject)


@pytest.mark.parametrize(
    "own",
    [
        {"namespace": "other", "serviceaccount": {"name": "orders"}},
        {"namespace": "shop", "serviceaccount": {"name": "other"}},
        {"namespace": "shop", "serviceaccount": "orders"},
        {"namespace": "shop"},
        {"serviceaccount": {"name": "orders"}},
        "shop",
        [],
    ],
)
def test_the_claims_of_kubernetes_must_agree(own: object) -> None:
    assert "two service accounts" in refusal_of(**{"kubernetes.io": own})


# ---------------------------------------------------------------- signatures


def test_a_changed_part_is_refused() -> None:
    header, claims, signature = token().split(".")
    other = part(claims_of("shop/admin"))
    first = "B" if signature[0] == "A" else "A"
    for forged in (
        f"{header}.{other}.{signature}",
        f"{part({'alg': 'RS256', 'kid': 'k1', 'typ': 'JWT'})}.{claims}.{signature}",
        f"{header}.{claims}.{first}{signature[1:]}",
        f"{header}.{claims}.",
        f"{header}.{claims}",
        f"{header}.{claims}.{signature}.",
        f".{header}.{claims}.{signature}",
        f"{header}.{claims}.{signature}=",
        f"{header}.{claims}.{signature} ",
    ):
        assert Check().refusal(forged) == WRONG


@pytest.mark.parametrize(
    "algorithm", ["none", "None", "HS256", "HS512", "RS384", "PS256", "ES384", "EdDSA", "", 1, None]
)
def test_other_algorithms_are_refused(algorithm: object) -> None:
    assert Check().refusal(token(alg=algorithm)) == WRONG


def test_no_signature_is_not_a_signature() -> None:
    for algorithm in ("none", "RS256"):
        header = part({"alg": algorithm, "kid": "k1"})
        for last in ("", base64url(b"\0"), base64url(b"\0" * 256)):
            assert Check().refusal(f"{header}.{part(claims_of())}.{last}") == WRONG


def test_a_public_key_is_not_a_shared_secret() -> None:
    """An attacker signs with HMAC under the public key, which everybody knows."""
    public = rsa_key().public_key()
    for secret in (
        public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo),
        public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo),
        json.dumps(RSA).encode(),
    ):
        for algorithm in ("HS256", "RS256"):
            signed = f"{part({'alg': algorithm, 'kid': 'k1'})}.{part(claims_of())}"
            digest = hmac.new(secret, signed.encode(), hashlib.sha256).digest()
            assert Check().refusal(f"{signed}.{base64url(digest)}") == WRONG


def test_a_key_is_used_for_its_algorithm_alone() -> None:
    assert Check().refusal(token(key=rsa_key(), alg="ES256")) == WRONG
    assert Check().refusal(token(key=p256_key(), alg="RS256", kid="k2")) == WRONG
    assert Check().refusal(token(key=p256_key(), kid="k1")) == WRONG


def test_the_key_of_the_header_must_be_one_of_the_issuer() -> None:
    """A key in the header, or an address of one, is the attacker's."""
    own = rsa_key(1)
    for header in (
        {"kid": "unknown"},
        {"kid": None},
        {"kid": ""},
        {"kid": ["k1"]},
        {"kid": "k" * 257},
        {"kid": "k1", "jwk": jwk(own)},
        {"kid": "k1", "jku": "https://attacker.example/keys"},
        {"kid": "k2"},
        {"kid": "../../etc/passwd"},
    ):
        assert Check().refusal(token(key=own, **header)) == WRONG


def test_a_token_with_the_id_of_another_key_is_refused() -> None:
    check = Check(jwk(rsa_key(), "k1"), jwk(rsa_key(1), "k2"))
    assert check.refusal(token(kid="k2")) == WRONG
    assert check.account(token(kid="k1"))
    assert check.account(token(key=rsa_key(1), kid="k2"))


def test_a_critical_extension_is_refused() -> None:
    assert Check().refusal(token(crit=["b64"], b64=False)) == WRONG


def test_a_signature_of_p256_has_two_halves() -> None:
    made = token(key=p256_key(), kid="k2")
    signed, _, last = made.rpartition(".")
    raw = base64.urlsafe_b64decode(last + "==")
    for changed in (raw[:-1], raw + b"\0", raw[:32] + b"\0" * 32, b"\0" * 64, raw[32:] + raw[:32]):
        assert Check().refusal(f"{signed}.{base64url(changed)}") == WRONG


def test_a_token_has_one_text() -> None:
    """The unused bits of the last character are zero."""
    made = token()
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    last = alphabet.index(made[-1])
    assert Check().refusal(made[:-1] + alphabet[last ^ 1]) == WRONG


def test_a_token_has_at_most_8_kib() -> None:
    short = len(token(claims_of(extra="")))
    pad = (TOKEN_BYTES_MAX - short) * 3 // 4
    texts = {
        len(made): made
        for size in range(pad - 3, pad + 6)
        if (made := token(claims_of(extra="x" * size)))
    }
    assert Check().account(texts[max(size for size in texts if size <= TOKEN_BYTES_MAX)])
    assert max(size for size in texts if size <= TOKEN_BYTES_MAX) >= TOKEN_BYTES_MAX - 2
    longer = texts[min(size for size in texts if size > TOKEN_BYTES_MAX)]
    assert Check().refusal(longer) == WRONG


def test_header_and_signature_are_short() -> None:
    """Only the claims are decoded after the check of the signature."""
    base = len(token(x="").partition(".")[0])
    fits = token(x="x" * ((PART_CHARS_MAX - base) * 3 // 4))
    assert len(fits.partition(".")[0]) in range(PART_CHARS_MAX - 3, PART_CHARS_MAX + 1)
    assert Check().account(fits)
    longer = token(x="x" * ((PART_CHARS_MAX - base) * 3 // 4 + 4))
    assert len(longer.partition(".")[0]) > PART_CHARS_MAX
    assert Check().refusal(longer) == WRONG
    signed = token().rpartition(".")[0]
    assert Check().refusal(f"{signed}.{'A' * (PART_CHARS_MAX + 4)}") == WRONG


@pytest.mark.parametrize(
    "text",
    [
        "",
        ".",
        "..",
        "...",
        "a.b.c",
        "ä.ö.ü",
        "\ud800.x.y",
        f"{base64url(b'[' * 3_000)}.{part({})}.AAAA",
        f"{base64url(b'1' * 3_000)}.{part({})}.AAAA",
        f"{part([])}.{part({})}.AAAA",
        f"{part('x')}.{part({})}.AAAA",
        f"{base64url(bytes(range(200)))}.{part({})}.AAAA",
    ],
)
def test_a_malformed_token_is_refused(text: str) -> None:
    assert Check().refusal(text) == WRONG
    assert not Check().tokens.has_unknown_key(text, address="")


def test_malformed_claims_are_refused_after_a_correct_signature() -> None:
    header = part({"alg": "RS256", "kid": "k1"})
    for claims in (b"[" * 3_000, b"[]", b"null", b"{", b'"x"', b"\xff"):
        signed = f"{header}.{base64url(claims)}"
        made = f"{signed}.{base64url(signature_of(rsa_key(), signed))}"
        assert "issuer" in Check().refusal(made)


# ---------------------------------------------------------------- keys and memory


def test_a_remembered_token_is_refused_when_its_key_leaves_the_set() -> None:
    check, made = Check(), token()
    assert check.account(made)
    check.keys = parse_key_set(key_set(P256))
    assert check.refusal(made) == WRONG
    check.keys = parse_key_set(key_set(jwk(rsa_key(1))))  # another key of the same id
    assert check.refusal(made) == WRONG
    check.keys = parse_key_set(key_set(RSA))
    assert check.account(made)
    check.keys = None
    with pytest.raises(KeyMissing):
        check.account(made)


def test_a_remembered_token_costs_no_check(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = 0
    has_signed = IssuerKey.has_signed

    def counted(key: IssuerKey, content: bytes, signature: bytes) -> bool:
        nonlocal checks
        checks += 1
        return has_signed(key, content, signature)

    monkeypatch.setattr(IssuerKey, "has_signed", counted)
    check, made = Check(), token()
    for _ in range(3):
        check.account(made)
    check.keys = parse_key_set(key_set(RSA))  # the same keys, read again
    check.account(made)
    assert checks == 1


def test_the_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes_tokens, "VERIFIED_MAX", 2)
    check = Check()
    texts = [token(claims_of(f"shop/a{number}")) for number in range(3)]
    for text in texts:
        check.account(text)
    assert len(check.tokens._verified) == 2
    assert all(check.account(text) for text in texts)


def test_an_unknown_key_is_known_by_the_header_alone() -> None:
    check = Check()
    assert check.tokens.has_unknown_key(token(kid="new"), address="")
    assert not check.tokens.has_unknown_key(token(), address="")
    check.keys = None
    assert check.tokens.has_unknown_key(token(), address="")


# ---------------------------------------------------------------- the limit of failed checks


def test_failed_checks_of_an_address_are_limited() -> None:
    check = Check()
    known, forged = token(), token(key=rsa_key(1))
    check.account(known)
    for _ in range(CHECKS_MAX):
        assert check.refusal(forged) == WRONG
    with pytest.raises(Overloaded, match=r"from 10\.0\.0\.1"):
        check.account(forged)
    with pytest.raises(Overloaded):
        check.account(token(claims_of("shop/new")))
    assert check.account(known), "a remembered token needs no check"
    assert check.refusal(forged, "10.0.0.2") == WRONG
    check.clock.advance(CHECKS_REFILL_MS)
    assert check.refusal(forged) == WRONG
    with pytest.raises(Overloaded):
        check.account(forged)


@pytest.mark.parametrize(
    "text",
    ["a.b.c", "x" * (TOKEN_BYTES_MAX + 1), token(kid="new"), token(kid="new").replace("e", "?")],
    ids=["short", "long", "unknown key", "not base64"],
)
def test_malformed_tokens_count_as_failed_checks(text: str) -> None:
    check, known = Check(), token()
    check.account(known)
    for _ in range(CHECKS_MAX):
        assert check.refusal(text) == WRONG
    with pytest.raises(Overloaded):
        check.account(text)
    assert check.account(known), "a remembered token needs no check"


def test_after_too_many_failures_an_unknown_key_is_not_looked_for() -> None:
    check, new = Check(), token(kid="new")
    for _ in range(CHECKS_MAX):
        assert check.tokens.has_unknown_key(new, address="10.0.0.1")
        check.refusal(new)
    assert not check.tokens.has_unknown_key(new, address="10.0.0.1")
    assert check.tokens.has_unknown_key(new, address="10.0.0.2")
    check.clock.advance(CHECKS_REFILL_MS)
    assert check.tokens.has_unknown_key(new, address="10.0.0.1")


def test_the_size_of_each_part_is_checked_before_it_is_decoded() -> None:
    header, signature = "h" * PART_CHARS_MAX, "s" * 86
    claims = "c" * (TOKEN_BYTES_MAX - PART_CHARS_MAX - 86 - 2)
    assert has_shape(f"{header}.{claims}.{signature}")
    for text in (
        f"h.{claims}cc{header}.{signature}",
        f"{header}h.c.{signature}",
        f".c.{signature}",
        f"h..{signature}",
        f"h.c.c.{signature}",
        f"hc.{signature}",
    ):
        assert not has_shape(text)
    sizes = [size for size in range(TOKEN_BYTES_MAX) if has_shape(f"h.c.{'s' * size}")]
    assert sizes == [86, *range(342, 684)]


def test_genuine_tokens_that_are_refused_are_counted() -> None:
    """They are not remembered, so each one costs a check."""
    check, ended = Check(), token(claims_of(exp=NOW_S - 3_600))
    for _ in range(CHECKS_MAX):
        assert check.refusal(ended) == "the Kubernetes token has ended"
    with pytest.raises(Overloaded):
        check.account(ended)


def test_errors_do_not_contain_the_token() -> None:
    made = token(key=rsa_key(1))
    with pytest.raises(WrongCredentials) as refused:
        Check().account(made)
    assert made[:20] not in repr(refused.value) + str(refused.value.__context__)


# ---------------------------------------------------------------- names


@pytest.mark.parametrize("account", ["shop/orders", "a/b", f"{'n' * 63}/a.b-c.{'x' * 63}"])
def test_names_of_service_accounts(account: str) -> None:
    assert check_account(account) == account


@pytest.mark.parametrize(
    "account",
    [
        "shop",
        "shop/",
        "/orders",
        "shop/a/b",
        "Shop/a",
        "shop/a_b",
        "shop/-a",
        "shop/a-",
        "shop/a..b",
        "shop/*",
        "shop/a\n",
        f"{'n' * 64}/a",
        "shop/" + ".".join(["a" * 63] * 4),
    ],
)
def test_malformed_names_of_service_accounts_are_rejected(account: str) -> None:
    with pytest.raises(BadRequest, match="NAMESPACE/NAME"):
        check_account(account)

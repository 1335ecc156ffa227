-- Proofs: whether a key that is trusted here has signed a stamp.

-- Verify a proof, `KEY:SIGNATURE`. `fenced.proofs` makes it: the hexadecimal signature covers the stamp without its seq.
CREATE OR REPLACE FUNCTION fenced_guard.proven(s fenced_guard.stamp, p_proof text) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  k fenced_guard.key;
  v_parts text[] := regexp_match(p_proof, '^([A-Za-z0-9_-]{1,32}):([0-9a-f]{64}|[0-9a-f]{128})$');
  v_signature bytea := decode(v_parts[2], 'hex');
  v_signed bytea := convert_to(
    E'fenced proof 1\n' || regexp_replace(s.text, '^((?:[^:]*:){3})[^:]*', E'\\1-'), 'UTF8');
BEGIN
  SELECT * INTO k FROM fenced_guard.key WHERE id = v_parts[1] AND revoked IS NULL;
  IF k.kind = 'hmac' AND length(v_signature) = 32 THEN
    -- Compare MACs of both, so that the time of the comparison reveals nothing about the right signature.
    RETURN fenced_guard.hmac_sha256(k.secret, fenced_guard.hmac_sha256(k.secret, v_signed))
      = fenced_guard.hmac_sha256(k.secret, v_signature);
  END IF;
  RETURN coalesce(k.kind = 'ed25519' AND length(v_signature) = 64
    AND fenced_guard.ed25519_verifies(k.secret, v_signed, v_signature), false);
END $$;

CREATE OR REPLACE FUNCTION fenced_guard.hmac_sha256(p_key bytea, p_message bytea) RETURNS bytea
LANGUAGE plpgsql IMMUTABLE STRICT SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_key   bytea := CASE WHEN length(p_key) > 64 THEN sha256(p_key) ELSE p_key END;
  v_inner bytea := decode(repeat('36', 64), 'hex');
  v_outer bytea := decode(repeat('5c', 64), 'hex');
BEGIN
  FOR i IN 0 .. length(v_key) - 1 LOOP
    v_inner := set_byte(v_inner, i, get_byte(v_inner, i) # get_byte(v_key, i));
    v_outer := set_byte(v_outer, i, get_byte(v_outer, i) # get_byte(v_key, i));
  END LOOP;
  RETURN sha256(v_outer || sha256(v_inner || p_message));
END $$;

-- Verification of Ed25519 signatures (RFC 8032, section 5.1.7), for proofs between trust domains.
--
-- Strict: only canonical encodings are accepted, no key and no R of small order, and the equation is the one without
-- cofactor. No secret is used here, so nothing has to run in constant time.

-- Bytes as a number, the lowest first.
CREATE OR REPLACE FUNCTION fenced_guard.ed25519_number(p_bytes bytea) RETURNS numeric
LANGUAGE plpgsql IMMUTABLE STRICT SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_number numeric := 0;
BEGIN
  FOR i IN REVERSE length(p_bytes) - 1 .. 0 LOOP
    v_number := v_number * 256 + get_byte(p_bytes, i);
  END LOOP;
  RETURN v_number;
END $$;

-- p_base to the power of 2 ** p_bits - p_less, modulo 2 ** 255 - 19. Every power that is needed has this form.
CREATE OR REPLACE FUNCTION fenced_guard.ed25519_power(p_base numeric, p_bits integer, p_less integer) RETURNS numeric
LANGUAGE plpgsql IMMUTABLE STRICT SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  p CONSTANT numeric := 57896044618658097711785492504343953926634992332820282019728792003956564819949;
  v_power numeric := 1;
  v_low integer := 32 - p_less;  -- its lowest five bits; all others are 1
BEGIN
  FOR i IN REVERSE p_bits - 1 .. 0 LOOP
    v_power := v_power * v_power % p;
    IF i > 4 OR (v_low >> i) & 1 = 1 THEN
      v_power := v_power * p_base % p;
    END IF;
  END LOOP;
  RETURN v_power;
END $$;

-- The x of the point that 32 bytes encode; NULL if they encode none.
CREATE OR REPLACE FUNCTION fenced_guard.ed25519_x(p_point bytea) RETURNS numeric
LANGUAGE plpgsql IMMUTABLE STRICT SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  p CONSTANT numeric := 57896044618658097711785492504343953926634992332820282019728792003956564819949;
  d CONSTANT numeric := 37095705934669439343138083508754565189542113879843219016388785533085940283555;
  i CONSTANT numeric := 19681161376707505956807079304988542015446066515923890162744021073123829784752;  -- its square is -1
  v_sign integer := get_bit(p_point, 255);
  y numeric := fenced_guard.ed25519_number(set_bit(p_point, 255, 0));
  u numeric := (y * y - 1) % p;
  v numeric := (d * (y * y % p) + 1) % p;
  x numeric;
BEGIN
  IF y >= p THEN
    RETURN NULL;
  END IF;
  -- A root of u / v, if there is one: u v^3 (u v^7)^((p - 5) / 8), or that times i.
  x := u * (v * v % p * v % p) % p;
  x := x * fenced_guard.ed25519_power(x * (v * v % p * v % p) % p * v % p, 252, 3) % p;
  IF (v * (x * x % p) - u) % p <> 0 THEN
    x := x * i % p;
    IF (v * (x * x % p) - u) % p <> 0 THEN
      RETURN NULL;
    END IF;
  END IF;
  x := (x + p) % p;
  IF x = 0 AND v_sign = 1 THEN
    RETURN NULL;
  END IF;
  RETURN CASE WHEN x % 2 = v_sign THEN x ELSE p - x END;
END $$;

-- Whether 32 bytes encode a point of small order, by its y. Every message would have a signature by such a key.
CREATE OR REPLACE FUNCTION fenced_guard.ed25519_is_small(p_point bytea) RETURNS boolean
LANGUAGE sql IMMUTABLE STRICT SET search_path = pg_catalog, pg_temp AS $$
  SELECT fenced_guard.ed25519_number(set_bit(p_point, 255, 0)) IN (
    0, 1, 57896044618658097711785492504343953926634992332820282019728792003956564819948,
    2707385501144840649318225287225658788936804267575313519463743609750303402022,
    55188659117513257062467267217118295137698188065244968500265048394206261417927)
$$;

CREATE OR REPLACE FUNCTION fenced_guard.ed25519_verifies(p_public bytea, p_message bytea, p_signature bytea) RETURNS boolean
LANGUAGE plpgsql IMMUTABLE STRICT SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  p  CONSTANT numeric := 57896044618658097711785492504343953926634992332820282019728792003956564819949;
  d2 CONSTANT numeric := 16295367250680780974490674513165176452449235426866156013048779062215315747161;  -- twice d
  l  CONSTANT numeric := 7237005577332262213973186563042994240857116359379907606001950938285454250989;  -- the order
  v_r bytea := substring(p_signature FROM 1 FOR 32);
  v_s bytea := substring(p_signature FROM 33);
  v_k bytea := decode(repeat('00', 32), 'hex');
  k numeric := fenced_guard.ed25519_number(sha512(v_r || p_public || p_message)) % l;
  ax numeric;
  ay numeric := fenced_guard.ed25519_number(set_bit(p_public, 255, 0));
  -- The points to add, each as y - x, y + x, 2dxy, 2z: B for a bit of S, -A for a bit of k, C = B - A for both.
  b1 CONSTANT numeric := 31204614345391077396927242593886631629853981173214368409736920319215404093758;
  b2 CONSTANT numeric := 3533012425803781230144052908719740726127014226477800802100354883158534798213;
  b3 CONSTANT numeric := 50237614328228664512531835696112167678046477356841409204013502641986506238568;
  a1 numeric; a2 numeric; a3 numeric;
  c1 numeric; c2 numeric; c3 numeric; c4 numeric;
  q1 numeric; q2 numeric; q3 numeric; q4 numeric;
  -- The sum so far, in extended coordinates, and the E, F, G and H of the RFC's formulas.
  x numeric := 0; y numeric := 1; z numeric := 1; t numeric;
  e numeric; f numeric; g numeric; h numeric;
  v_bits integer;
BEGIN
  IF length(p_public) <> 32 OR length(p_signature) <> 64 OR fenced_guard.ed25519_number(v_s) >= l
     OR fenced_guard.ed25519_is_small(p_public) OR fenced_guard.ed25519_is_small(v_r) THEN
    RETURN false;
  END IF;
  ax := fenced_guard.ed25519_x(p_public);
  IF ax IS NULL THEN
    RETURN false;
  END IF;
  FOR i IN 0 .. 31 LOOP
    v_k := set_byte(v_k, i, (k % 256)::integer);
    k := div(k, 256);
  END LOOP;
  a1 := ay + ax;
  a2 := ay - ax;
  a3 := -d2 * ax % p * ay % p;
  e := (b2 * a2 - b1 * a1) % p;
  h := (b2 * a2 + b1 * a1) % p;
  t := b3 * ax % p * ay % p;
  f := 2 + t;
  g := 2 - t;
  c1 := (g * h - e * f) % p;
  c2 := (g * h + e * f) % p;
  c3 := d2 * (e * h % p) % p;
  c4 := 2 * f * g % p;
  FOR i IN REVERSE 252 .. 0 LOOP
    g := x * x % p;
    h := y * y % p;
    e := x + y;
    e := (g + h - e * e) % p;
    f := g - h;
    h := g + h;
    g := f;
    f := (2 * z * z + g) % p;
    x := e * f % p;
    y := g * h % p;
    z := f * g % p;
    v_bits := get_bit(v_s, i) + 2 * get_bit(v_k, i);
    IF v_bits > 0 THEN
      t := e * h % p;
      IF v_bits = 1 THEN
        q1 := b1; q2 := b2; q3 := b3; q4 := 2;
      ELSIF v_bits = 2 THEN
        q1 := a1; q2 := a2; q3 := a3; q4 := 2;
      ELSE
        q1 := c1; q2 := c2; q3 := c3; q4 := c4;
      END IF;
      g := (y - x) * q1 % p;
      h := (y + x) * q2 % p;
      e := h - g;
      h := h + g;
      t := t * q3 % p;
      z := z * q4 % p;
      f := z - t;
      g := z + t;
      x := e * f % p;
      y := g * h % p;
      z := f * g % p;
    END IF;
  END LOOP;
  z := fenced_guard.ed25519_power(z, 255, 21);  -- the inverse
  x := (x * z % p + p) % p;
  y := (y * z % p + p) % p;
  RETURN y = fenced_guard.ed25519_number(set_bit(v_r, 255, 0)) AND x % 2 = get_bit(v_r, 255);
END $$;

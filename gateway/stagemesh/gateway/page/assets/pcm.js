/** The audio of the gateway: signed 16-bit samples of one channel, little-endian, at 24,000 Hz. */

export const RATE_HZ = 24000;

/** Returns samples of PCM bytes as floats. The number of bytes must be even. */
export function decodePcm(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  return Float32Array.from({ length: bytes.byteLength / 2 }, (_, index) => view.getInt16(2 * index, true) / 32768);
}

/** Returns the bytes of a text in base64. */
export function fromBase64(text) {
  return Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
}

/** Returns bytes as a text in base64. */
export function toBase64(bytes) {
  return btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join(""));
}

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import { DataType } from "stagemesh/v1/tensor";
import { FlowDigest } from "./digest.js";

interface Vector {
  readonly name: string;
  readonly chunks: { tensors: { name: string; data_type: keyof typeof DataType; shape: number[] }[] }[];
  readonly count: number;
  readonly sha256: string;
}

const path = new URL("../../../../protos/vectors/digest.json", import.meta.url);
for (const { name, chunks, count, sha256 } of JSON.parse(readFileSync(path, "utf8")) as Vector[]) {
  test(`digest of ${name}`, () => {
    const digest = new FlowDigest();
    for (const { tensors } of chunks) {
      digest.add(tensors.map(({ name, data_type, shape }) => ({ name, dtype: DataType[data_type], shape })));
    }
    assert.equal(Buffer.from(digest.finish()).toString("hex"), sha256);
    assert.equal(digest.count, BigInt(count));
  });
}

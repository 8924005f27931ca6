import { setTimeout as sleep } from "node:timers/promises";
import { isDeepStrictEqual } from "node:util";
import { type ServerWritableStream, status } from "@grpc/grpc-js";
import { errorToStatus, failure, type StagemeshError, toStagemeshError } from "stagemesh/errors";
import { Connector } from "stagemesh/v1/chunk";
import { EdgeUsage, Finish, FinishReason, Usage } from "stagemesh/v1/request";
import {
  type CancelStepRequest,
  CancelStepResponse,
  type ExecuteStepRequest,
  ExecuteStepResponse,
  type InputBinding,
  type OutputBinding,
  type RebindStepRequest,
  StepFinished,
} from "stagemesh/v1/stage";
import { checkBinding, checkStep, invalidEdge, resolveOptions } from "./checks.js";
import { createChunker } from "./chunking.js";
import type { Consumer, Identity } from "./consumer.js";
import { RecentMap, Signal } from "./flows.js";
import type { StageFunction, Task } from "./function.js";
import { IncomingEdge, type IncomingFlow } from "./incoming.js";
import { OutgoingEdge } from "./outgoing.js";
import { OutputStream } from "./outputs.js";
import type { Packet } from "./packets.js";
import type { Producer } from "./producer.js";

const REMEMBERED_REQUESTS = 4096;
const WITHOUT_CALLER_MS = 5000;
const LEAVING_MS = 200;
const RETAINED_MS = 30_000;
/** The longest time of a timer in Node.js. */
const LONGEST_TIMER_MS = 2 ** 31 - 1;

type Event = NonNullable<ExecuteStepResponse["event"]>;
type Call = ServerWritableStream<ExecuteStepRequest, ExecuteStepResponse>;

/** What the steps of a stage have in common. */
export interface StageParts {
  readonly identity: Identity;
  readonly fn: StageFunction;
  readonly consumer: Consumer;
  readonly producer: Producer;
}

/** The steps of this replica: those that run, and those that have ended lately. */
export class Steps {
  #isDraining = false;
  readonly #steps = new Map<string, Step>();
  readonly #attempts = new RecentMap<string, number>(REMEMBERED_REQUESTS);

  constructor(readonly parts: StageParts) {}

  /** Serves `ExecuteStep`. */
  execute(call: Call): void {
    try {
      void this.#stepOf(call.request).serve(call);
    } catch (thrown) {
      const error = toStagemeshError(thrown).within({ stage: this.parts.identity.stage });
      call.emit("error", errorToStatus(error));
    }
  }

  /** Serves `RebindStep`. Changes nothing if it throws. */
  rebind(request: RebindStepRequest): void {
    const step = this.#steps.get(request.stepId);
    if (step === undefined) {
      throw failure(status.NOT_FOUND, "UNKNOWN_STEP", `no step ${request.stepId} is known here`);
    }
    step.rebind(request);
  }

  /** Serves `CancelStep`. */
  async cancel({ requestId, attempt, reason, whenLeft }: CancelStepRequest): Promise<CancelStepResponse> {
    // The end of the caller's own calls may still be on its way.
    if (whenLeft) await sleep(LEAVING_MS);
    const cancelled = [...this.#steps.values()].filter(
      ({ request, isOver, hasCaller }) =>
        request.requestId === requestId &&
        (attempt === undefined || request.attempt <= attempt) &&
        !isOver &&
        !(whenLeft && hasCaller),
    );
    const error = failure(status.CANCELLED, "CANCELLED", reason || "the request was cancelled");
    await Promise.all(cancelled.map((step) => step.stop(error)));
    const engineSteps = cancelled.reduce((total, step) => total + step.usage.engineSteps, 0n);
    return CancelStepResponse.create({ stopped: cancelled.length, usage: { engineSteps } });
  }

  /** Rejects new steps after `acceptingMs`, and waits until the others have ended. Those that take too long are stopped. */
  async drain(acceptingMs: number, timeoutMs: number): Promise<void> {
    const drained = failure(status.UNAVAILABLE, "DRAINED", `replica ${this.parts.identity.replica} was stopped`);
    const timer = setTimeout(() => this.#steps.forEach((step) => step.isOver || void step.stop(drained)), timeoutMs);
    // An orchestrator may have planned steps before it learned that this replica drains.
    await sleep(acceptingMs);
    this.#isDraining = true;
    await Promise.all([...this.#steps.values()].map((step) => step.ended()));
    clearTimeout(timer);
  }

  /** Returns the step of a request, which is started unless it is known. */
  #stepOf(request: ExecuteStepRequest): Step {
    const { requestId, stepId, attempt } = request;
    const highest = this.#attempts.get(requestId) ?? 0;
    const facts = { attempt: highest };
    if (attempt < highest) {
      const message = `attempt ${attempt} of ${requestId} was replaced by attempt ${highest}`;
      throw failure(status.FAILED_PRECONDITION, "STALE_ATTEMPT", message, {}, facts);
    }
    const known = this.#steps.get(stepId);
    if (known !== undefined) {
      // Maps have no order, so the decoded messages are compared, not their bytes.
      if (isDeepStrictEqual(contentOf(known.request), contentOf(request))) {
        known.lowestAttempt = Math.max(known.lowestAttempt, request.lowestAttempt);
        return known;
      }
      throw failure(status.ALREADY_EXISTS, "STEP_EXISTS", `step ${stepId} exists with other content`, {}, facts);
    }
    if (request.attachOnly) {
      throw failure(status.NOT_FOUND, "UNKNOWN_STEP", `step ${stepId} was not started here, or has ended long ago`);
    }
    if (this.#isDraining) {
      const message = `replica ${this.parts.identity.replica} stops and accepts no steps`;
      throw failure(status.FAILED_PRECONDITION, "NOT_READY", message);
    }
    const step = new Step(request, this.parts, () => this.#steps.delete(stepId));
    this.#attempts.set(requestId, attempt);
    for (const { request: other, stop } of this.#steps.values()) {
      if (other.requestId !== requestId || other.attempt >= attempt) continue;
      const message = `attempt ${attempt} replaces attempt ${other.attempt}`;
      void stop(failure(status.FAILED_PRECONDITION, "STALE_ATTEMPT", message, {}, { attempt }));
    }
    this.#steps.set(stepId, step);
    step.start();
    return step;
  }
}

/** Returns a request without what repeated calls of its step need not share. */
function contentOf(request: ExecuteStepRequest): ExecuteStepRequest {
  return { ...request, traceparent: "", attachOnly: false, lowestAttempt: 0 };
}

/** One step: a stage's part of a request. */
class Step {
  readonly usage = Usage.create();
  /** The lowest attempt in which edges may be rebound. */
  lowestAttempt = 0;
  readonly #incoming = new Map<string, IncomingEdge>();
  readonly #outgoing = new Map<string, OutgoingEdge>();
  /** The binding in force of each edge. */
  readonly #bindings = new Map<string, InputBinding | OutputBinding>();
  readonly #outputs: ReadonlyMap<string, OutputStream>;
  readonly #options: Task["options"];
  readonly #events: Event[] = [];
  readonly #changed = new Signal();
  readonly #stopping = new AbortController();
  readonly #beganAt = performance.now();
  #end: "succeeded" | StagemeshError | undefined;
  #stopped: StagemeshError | undefined;
  #firstOutputS: number | undefined;
  #callers = 0;
  #callerTimer: NodeJS.Timeout | undefined;
  /** The latest one of the calls, in milliseconds since 1970. Infinity after a call without one. */
  #deadlineMs = 0;
  #deadlineTimer: NodeJS.Timeout | undefined;

  /** Throws StagemeshError if the step cannot run here. */
  constructor(
    readonly request: ExecuteStepRequest,
    readonly parts: StageParts,
    /** Called when nothing needs the step any more. */
    readonly onForgotten: () => void,
  ) {
    const { signature } = parts.fn;
    checkStep(request, signature);
    this.#options = resolveOptions(request.parameters?.options ?? {}, signature);
    const streamed = signature.emits.filter(({ spec }) => request.streamed.some(({ tensor }) => tensor === spec?.name));
    this.#outputs = new Map(streamed.map((emitted) => [emitted.spec?.name ?? "", new OutputStream(emitted)]));
    for (const { edge } of request.inputs) this.#incoming.set(edge, new IncomingEdge(edge, signature.accepts));
    for (const { edge, policy, tensors } of request.outputs) {
      // The function may wait for packets, and would notice a failure only when it emits one.
      const onFailed = (error: StagemeshError): void => void this.stop(error);
      this.#outgoing.set(edge, new OutgoingEdge(edge, createChunker(policy), tensors, onFailed));
    }
  }

  get isOver(): boolean {
    return this.#end !== undefined;
  }

  get hasCaller(): boolean {
    return this.#callers > 0;
  }

  /** Registers the incoming flows, and runs the function. */
  start(): void {
    for (const binding of this.request.inputs) {
      const edge = this.#incoming.get(binding.edge);
      if (edge) edge.flow = this.#expect(binding, edge);
    }
    this.#emit({ $case: "accepted", value: { queuePosition: 0, flowAttempts: {} } });
    for (const binding of this.request.outputs) this.#bind(binding);
    void this.#run();
  }

  /** Sends a caller all events of the step from the first one on, and then the end of the step. */
  async serve(call: Call): Promise<void> {
    call.on("cancelled", () => this.#changed.fire());
    this.#callers += 1;
    clearTimeout(this.#callerTimer);
    this.#extend(call.getDeadline().valueOf());
    for (let sent = 0; !call.cancelled; await this.#changed.next()) {
      for (; sent < this.#events.length; sent++) call.write(ExecuteStepResponse.create({ event: this.#events[sent] }));
      if (this.#end === "succeeded") call.end();
      else if (this.#end !== undefined) call.emit("error", errorToStatus(this.#end));
      if (this.isOver) break;
    }
    this.#callers -= 1;
    if (this.hasCaller || this.isOver) return;
    const error = failure(status.CANCELLED, "CANCELLED", "the step has no caller");
    this.#callerTimer = setTimeout(() => this.stop(error), WITHOUT_CALLER_MS);
  }

  /** Stops the step at the deadline of a call, unless an earlier call has a later one. */
  #extend(deadlineMs: number): void {
    this.#deadlineMs = Math.max(this.#deadlineMs, deadlineMs);
    clearTimeout(this.#deadlineTimer);
    const remainingMs = this.#deadlineMs - Date.now();
    if (remainingMs > LONGEST_TIMER_MS || this.isOver) return;
    const error = failure(status.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", "the deadline of the step has passed");
    this.#deadlineTimer = setTimeout(() => this.stop(error), remainingMs);
  }

  /** Stops the step. Resolves when it has ended. */
  readonly stop = (error: StagemeshError): Promise<void> => {
    this.#stopped ??= error;
    this.#stopping.abort(error);
    this.#closeEdges(error);
    return this.ended();
  };

  async ended(): Promise<void> {
    while (!this.isOver) await this.#changed.next();
  }

  rebind({ inputs, outputs }: RebindStepRequest): void {
    const changes: (() => void)[] = [];
    for (const { binding, firstRows } of inputs) {
      const edge = binding && this.#incoming.get(binding.edge);
      if (!edge) throw this.#unknownEdge(binding?.edge);
      if (this.#isInForce(binding)) continue;
      edge.checkRows(firstRows);
      changes.push(() => edge.rebind(this.#expect(binding, edge), firstRows));
    }
    for (const binding of outputs) {
      const edge = this.#outgoing.get(binding.edge);
      if (!edge) throw this.#unknownEdge(binding.edge);
      if (this.#isInForce(binding)) continue;
      edge.checkRetained();
      changes.push(() => this.#bind(binding));
    }
    for (const change of changes) change();
    // Later callers learn by it which attempts are in force.
    const flowAttempts = Object.fromEntries([...this.#bindings].map(([edge, { attempt }]) => [edge, attempt]));
    this.#events[0] = { $case: "accepted", value: { queuePosition: 0, flowAttempts } };
  }

  async #run(): Promise<void> {
    const { requestId, seed, input } = this.request;
    const task = { requestId, seed, input, options: this.#options, signal: this.#stopping.signal };
    try {
      const [packets = noPackets()] = this.#incoming.values();
      for await (const packet of this.parts.fn.run(packets, task)) await this.#send(packet);
      if (this.#stopped !== undefined) throw this.#stopped;
      for (const output of this.#outputs.values()) this.#emit({ $case: "output", value: output.finish() });
      await Promise.all([...this.#outgoing.values()].map((edge) => edge.finish()));
      // If the function ended before its input, a rejection of the rest would fail the producer and the request.
      for await (const unread of packets) void unread;
      this.#emitFinished();
      this.#end = "succeeded";
    } catch (thrown) {
      this.#end = (this.#stopped ?? toStagemeshError(thrown)).within({ stage: this.parts.identity.stage });
      this.#emit({ $case: "usage", value: this.usage });
      this.#closeEdges(this.#end);
    }
    clearTimeout(this.#callerTimer);
    clearTimeout(this.#deadlineTimer);
    this.#changed.fire();
    this.#forgetLater();
  }

  async #send(packet: Packet): Promise<void> {
    this.#firstOutputS ??= this.#elapsedS();
    for (const tensor of packet.tensors) {
      const part = this.#outputs.get(tensor.name)?.add(tensor);
      if (part) this.#emit({ $case: "output", value: part });
    }
    this.usage.engineSteps += 1n;
    this.#emit({ $case: "progress", value: { engineSteps: this.usage.engineSteps } });
    await Promise.all([...this.#outgoing.values()].map((edge) => edge.send(packet)));
  }

  #emitFinished(): void {
    const timings = { startedS: 0, firstOutputS: this.#firstOutputS, finishedS: this.#elapsedS() };
    const edges = [...this.#outgoing.values()].map(({ name, usage }) =>
      EdgeUsage.create({ edge: name, connector: Connector.GRPC, ...usage }),
    );
    const finish = Finish.create({ reason: FinishReason.END });
    this.#emit({ $case: "finished", value: StepFinished.create({ usage: this.usage, timings, edges, finish }) });
  }

  #closeEdges(error: StagemeshError): void {
    for (const edge of this.#incoming.values()) edge.close(error);
    for (const edge of this.#outgoing.values()) edge.abort(error);
  }

  /** Retains the events for another call, and the chunks of outgoing edges until their consumers have committed them. */
  #forgetLater(): void {
    setTimeout(() => {
      const isNeeded = [...this.#outgoing.values()].some(({ isCommitted, flow }) => !isCommitted && !flow?.error);
      if (isNeeded && this.#end === "succeeded") this.#forgetLater();
      else this.onForgotten();
    }, RETAINED_MS).unref();
  }

  #expect(binding: InputBinding, edge: IncomingEdge): IncomingFlow {
    this.#bindings.set(binding.edge, binding);
    return this.parts.consumer.expect(this.#keyOf(binding), binding.producer, edge);
  }

  #bind(binding: OutputBinding): void {
    this.#bindings.set(binding.edge, binding);
    const edge = this.#outgoing.get(binding.edge);
    if (edge) this.parts.producer.bind(edge, this.#keyOf(binding), binding.consumer, binding.endpoint);
  }

  /** Returns whether a binding is the present one of its edge. Throws StagemeshError if it may not replace it. */
  #isInForce(binding: InputBinding | OutputBinding): boolean {
    const { edge, attempt } = binding;
    const present = this.#bindings.get(edge) ?? binding;
    checkBinding(binding);
    if (!isDeepStrictEqual(contentKeyOf(binding), contentKeyOf(present))) {
      throw invalidEdge(`a rebinding cannot change what edge ${edge} transfers`);
    }
    const lowest = Math.max(present.attempt, this.lowestAttempt);
    if (attempt < lowest) {
      const message = `edge ${edge} is in attempt ${lowest}, not ${attempt}`;
      throw failure(status.FAILED_PRECONDITION, "STALE_ATTEMPT", message, { edge }, { attempt: lowest });
    }
    return attempt === present.attempt && isDeepStrictEqual(peerOf(binding), peerOf(present));
  }

  #keyOf({ edge, attempt }: InputBinding | OutputBinding) {
    return { requestId: this.request.requestId, edge, attempt };
  }

  #unknownEdge(edge = ""): StagemeshError {
    return failure(status.NOT_FOUND, "UNKNOWN_EDGE", `step ${this.request.stepId} has no edge ${edge}`, { edge });
  }

  #elapsedS(): number {
    return (performance.now() - this.#beganAt) / 1000;
  }

  #emit(event: Event): void {
    this.#events.push(event);
    this.#changed.fire();
  }
}

/** Returns the replica at the other end of an edge. */
function peerOf(binding: InputBinding | OutputBinding): readonly string[] {
  return "producer" in binding ? [binding.producer] : [binding.consumer, binding.endpoint];
}

/** Returns what a rebinding cannot change. */
function contentKeyOf(binding: InputBinding | OutputBinding): readonly unknown[] {
  const { transform } = binding;
  return "producer" in binding ? [transform, binding.apart] : [transform, binding.tensors.toSorted(), binding.tokens];
}

async function* noPackets(): AsyncGenerator<Packet, void, void> {}

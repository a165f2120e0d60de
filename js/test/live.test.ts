import { describe, expect, it, vi } from "vitest";
import { follow, type Json, patched } from "../src/lib/live";
import { MockModel } from "./helpers";

function started(number = 1, document: unknown = { a: 1, deep: { b: 2, c: 3 } }) {
  const model = new MockModel({ snapshot: { number, document } });
  const seen: Json[] = [];
  const answers: Json[] = [];
  const feed = follow<Json>(
    model,
    () => seen.push(feed.document()),
    (answer) => answers.push(answer),
  );
  return { model, feed, seen, answers };
}

describe("patched", () => {
  it("puts values in, takes nulls out, and keeps what didn't change", () => {
    const old = { a: 1, same: { x: 1 }, deep: { b: 2, c: 3 }, list: [1, 2] };
    const now = patched(old, { a: null, deep: { b: 9, c: null, d: 4 }, list: [7] }) as typeof old;
    expect(now).toEqual({ same: { x: 1 }, deep: { b: 9, d: 4 }, list: [7] });
    expect(now.same).toBe(old.same);
    expect(old.deep).toEqual({ b: 2, c: 3 });
    expect(patched("text", { a: { b: 1 } })).toEqual({ a: { b: 1 } });
  });
});

describe("follow", () => {
  it("starts with the trait and says which number it has", () => {
    const { model, feed } = started(4);
    expect(feed.document()).toEqual({ a: 1, deep: { b: 2, c: 3 } });
    expect(model.sent).toMatchObject([{ type: "open", number: 4 }]);
  });

  it("takes patches in their order and passes over one that it has", () => {
    const { model, feed, seen } = started();
    model.say({ type: "patch", number: 2, patch: { a: 5 } });
    model.say({ type: "patch", number: 2, patch: { a: 6 } });
    model.say({ type: "patch", number: 3, patch: { deep: { c: null } } });
    expect(feed.document()).toEqual({ a: 5, deep: { b: 2 } });
    expect(seen).toHaveLength(2);
  });

  it("asks once for the whole when a number is missing, and goes on from there", () => {
    const { model, feed } = started();
    model.say({ type: "patch", number: 3, patch: { a: 3 } });
    model.say({ type: "patch", number: 4, patch: { a: 4 } });
    expect(model.sent.filter((m) => (m as Json).type === "whole")).toHaveLength(1);
    expect(feed.document().a).toBe(1);
    model.say({ type: "whole", number: 4, document: { a: 4 } });
    model.say({ type: "patch", number: 5, patch: { a: 5 } });
    expect(feed.document()).toEqual({ a: 5 });
    model.say({ type: "patch", number: 9, patch: {} });
    expect(model.sent.filter((m) => (m as Json).type === "whole")).toHaveLength(2);
  });

  it("passes other messages on and survives nonsense", () => {
    const { model, answers, seen } = started();
    model.say({ type: "preview", ask: 1 });
    model.say(null);
    model.say("text");
    expect(answers).toEqual([{ type: "preview", ask: 1 }]);
    expect(seen).toEqual([]);
    expect(started(0, null).feed.document()).toEqual({});
  });

  it("speaks up from time to time and takes its leave", () => {
    vi.useFakeTimers();
    const { model, feed } = started();
    vi.advanceTimersByTime(65_000);
    expect(model.sent.map((m) => (m as Json).type)).toEqual(["open", "open", "open"]);
    feed.close();
    feed.close();
    vi.advanceTimersByTime(65_000);
    expect(model.sent.map((m) => (m as Json).type)).toEqual(["open", "open", "open", "close"]);
    const views = new Set(model.sent.map((m) => (m as Json).view));
    expect(views.size).toBe(1);
    expect(model.listeners.get("msg:custom")?.size).toBe(0);
    vi.useRealTimers();
  });

  it("shows what it has where there is no kernel", () => {
    const model = new MockModel({ snapshot: { number: 1, document: { a: 1 } } });
    model.send = () => {
      throw new Error("no comm");
    };
    const feed = follow<Json>(
      model,
      () => {},
      () => {},
    );
    expect(feed.document()).toEqual({ a: 1 });
    feed.close();
  });
});

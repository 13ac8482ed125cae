export function useEffect(run: () => void | (() => void), on?: readonly unknown[]): void;
export function useRef<T>(first: T): { current: T };
export function useState<T>(first: T): [T, (next: T) => void];
